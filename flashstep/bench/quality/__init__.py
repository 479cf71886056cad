"""Accuracy: questions with known answers, what an answer says, and every answer kept. Knows no engine; tests ask real ones."""
