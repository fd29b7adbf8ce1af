"""What a bench asks, which answers may be trusted, and what they come to."""
