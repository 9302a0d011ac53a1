"""One file per idea: a metric maps a Batch to one number per image."""
