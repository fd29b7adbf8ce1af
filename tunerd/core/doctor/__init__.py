"""What is wrong with a box, and what to do: rules over facts in which None is unknown."""
