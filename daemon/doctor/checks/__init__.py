"""The checks of `inferd doctor`, by subject."""
