"""Pictures of speculative decoding: its rounds, acceptance, speed-up and draft views."""
