"""Networks: built, opened, recognised, loaded with weights, saved and loaded as artifacts."""
