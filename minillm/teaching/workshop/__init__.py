"""What the lessons use and a learner need not write: meters, loops that drive an engine, versions with one mistake."""
