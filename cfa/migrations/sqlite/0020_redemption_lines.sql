-- Payments of a redemption by holder: a holder reads the own ones alone.
CREATE INDEX redemption_line_of_user ON redemption_line (redemption_id, user_id, position);
