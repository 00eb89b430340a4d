-- The polled intents of a user are counted: one user must not delay the polls of all others.
CREATE INDEX intents_polled_of_user ON intents (user_id, status) WHERE polled;
