"""Host-memory and disk tiers for cache blocks and recurrent states. Knows cache layouts, not schedulers."""
