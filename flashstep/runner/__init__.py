"""One rank's device side: a StepPlan in, a StepResult out."""
