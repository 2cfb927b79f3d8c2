"""What must be set before any test imports Ray, which reads it once."""

import os

# `ray start` asks for a token once this user has one, and a driver with an explicit address sends it only if told to
os.environ["RAY_AUTH_MODE"] = "token"
