"""The process that measures a model for `inferd tune`: times of steps, losses of KV types."""
