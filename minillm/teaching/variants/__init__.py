"""Cases that differ from student to student: a maker per exercise, fed with numbers from the course's secret.

A maker draws shapes, block sizes, prompts and draft lengths; the reference gives the answers. Cases must be valid
whatever is drawn, and unambiguous: no ties, no numbers in the middle between two codes.
"""
