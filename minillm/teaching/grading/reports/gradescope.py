"""The `results.json` of one submission, as Gradescope's autograder specification describes it."""

from __future__ import annotations

import json

from minillm.teaching.grading.grades import Status, Submission
from minillm.teaching.grading.reports.tables import as_text


def results(submission: Submission) -> str:
    """One test of one point per exercise. A submission without exercises has the score 0 and says why."""
    tests = [
        {
            "name": grade.exercise,
            "number": str(number),
            "score": int(grade.status is Status.PASSED),
            "max_score": 1,
            "status": "passed" if grade.status is Status.PASSED else "failed",
            "output": as_text(grade) if grade.status is not Status.PASSED else "",
            "output_format": "text",
            "visibility": "after_due_date" if grade.hidden else "visible",
            "tags": [grade.status.value],
        }
        for number, grade in enumerate(submission.exercises, 1)
    ]
    whole: dict[str, object] = {"tests": tests, "output_format": "text", "visibility": "visible"}
    if not tests:
        whole |= {"score": 0, "output": f"{submission.status.value}: {submission.reason}"}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"
