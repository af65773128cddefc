"""Deaths of workers: the tasks to blame, their trials and quarantine, recovery of the others."""
