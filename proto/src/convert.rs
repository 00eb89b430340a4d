//! Between wire shapes and text numbers: the only place that knows how a `Decimal`, an amount or a time looks in a message.
