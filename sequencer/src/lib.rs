//! Room `sequencer`.
