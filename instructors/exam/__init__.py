"""Exam questions whose numbers differ from student to student."""
