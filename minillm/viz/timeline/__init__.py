"""Pictures over time: requests × steps, and where the time of one completion goes."""
