"""What networks and exported files cost, against each other."""
