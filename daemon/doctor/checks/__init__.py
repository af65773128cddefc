"""The checks of `inferd doctor`, by subject. `examination.check_all` lists them all, in order."""
