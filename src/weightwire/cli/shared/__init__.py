"""What commands share: the terminal, options, signals, and how runs are found and followed."""
