-- Deposits that were issued again by an operator and failed again are open for a decision (T24).
UPDATE suspended_deposit SET resolved = 0
 WHERE resolved = 1
   AND EXISTS (SELECT 1 FROM operation WHERE flow = 1 AND external_ref = payment_id AND operation.operation_id <> suspended_deposit.operation_id)
   AND NOT EXISTS (SELECT 1 FROM operation WHERE flow = 1 AND external_ref = payment_id AND status NOT IN (8, 9));
-- A deposit whose mint the node refused did not act: it may be issued again or paid back.
UPDATE operation SET status = 8 WHERE flow = 1 AND status = 9;
-- Tries of an issue's deployment and of its redemption: each try has keys of its own in the ledger and on chain.
ALTER TABLE instrument ADD COLUMN deploy_attempts INTEGER NOT NULL DEFAULT 0;
ALTER TABLE issue_redemption ADD COLUMN attempt INTEGER NOT NULL DEFAULT 0;
