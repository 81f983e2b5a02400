//! The protocol by one thread: what each step does to the words.
