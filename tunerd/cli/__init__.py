"""The command line: parser, progress and rendering, nothing else."""
