"""The batch of a step: its samples, images and shares."""
