"""Parameters as other runtimes write them: spellings, keys without effect, lenient values."""
