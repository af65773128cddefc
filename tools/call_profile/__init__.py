"""The functions of inferd that a call of the protocol passes."""
