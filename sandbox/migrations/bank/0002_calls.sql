-- Answers of payments by key are in the table of answered calls, with those of SetFault (D50).
DROP TABLE pays;
