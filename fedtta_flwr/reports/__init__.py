"""What a run leaves behind: the run directory, its tables, and the lines that it prints."""
