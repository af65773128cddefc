"""Jobs: requests that outlive their client. `jobs.py` owns them, `runner.py` computes them."""
