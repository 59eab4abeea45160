"""Small tools that the other folders share."""
