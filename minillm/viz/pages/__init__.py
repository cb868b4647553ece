"""Pictures of the block pool: block tables above, physical pages below."""
