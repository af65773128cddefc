"""Facts about models' files, the index of KV files on disk, and persisted settings."""
