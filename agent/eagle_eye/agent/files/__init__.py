"""Files that others write or name, opened and read within bounds."""
