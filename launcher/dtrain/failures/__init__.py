"""Why a worker failed, and what to do about it. Pure."""
