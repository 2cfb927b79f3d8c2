"""Losses: advantages, the policy loss, corrections of off-policy tokens, and divergences from a teacher."""
