"""What stands in for a normalization layer at inference, and what each layer computes."""
