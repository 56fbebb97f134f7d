"""The explorer: groups are claimed, sampled, scored and put back."""
