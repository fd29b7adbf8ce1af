"""One file per thing that an operator or the scheduler asks for."""
