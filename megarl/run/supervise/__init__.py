"""Starting, watching, replacing and ending the processes of an attempt."""
