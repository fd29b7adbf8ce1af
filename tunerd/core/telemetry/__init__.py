"""What is watched: readings of GPU, host and engine, what they come to over time, and their history."""
