"""Images and sounds: the encoder processes of models, and the bounds on contents."""
