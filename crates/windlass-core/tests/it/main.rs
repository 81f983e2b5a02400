//! The integration tests of the core, as one program.

mod fuzz_corpus;
mod request_vectors;
