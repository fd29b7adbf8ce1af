"""Many boxes, each of which stays its own: what is told to them, and what they tell."""
