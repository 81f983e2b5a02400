//! Names for what a profiler shows.
//!
//! Owns: the ranges that this module's calls open, so that Nsight Systems shows an offload or an apply by its name, above
//! the kernels and copies that it starts. Called at the top of every call that takes time on a device. Must not: cost
//! anything without a profiler.
//!
//! NVTX is a header that looks once, at the first range, whether a profiler has named its library in
//! `NVTX_INJECTION64_PATH`, as `nsys profile` does. If not, a range is a call that returns.

use std::marker::PhantomData;

/// A named range, from here until it is dropped, on the thread that opened it.
#[derive(Debug)]
#[must_use = "a range ends when it is dropped"]
pub struct Named(PhantomData<*const ()>);

impl Named {
    /// Opens a range within those that this thread has open.
    pub fn new(name: &'static str) -> Named {
        nvtx::range_push!("windlass {name}");
        Named(PhantomData)
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        nvtx::range_pop!();
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// A profiler: writes down what it is told.
    const PROFILER: &str = r#"
        #include <stdio.h>
        #include <stdlib.h>
        typedef void (*Function)(void);
        struct Callbacks { size_t size; int (*table)(int module, Function*** out, unsigned* count); };
        static FILE* out;
        static int depth;
        static int push(const char* name) { fprintf(out, "begin %s\n", name); return depth++; }
        static int pop(void) { fprintf(out, "end\n"); fflush(out); return --depth; }
        int InitializeInjectionNvtx2(const void* (*get)(unsigned)) {
            const struct Callbacks* callbacks = get(1);
            Function** functions;
            unsigned count;
            if (!callbacks || !callbacks->table(1, &functions, &count) || count < 12) return 0;
            out = fopen(getenv("RANGES_SEEN"), "w");
            *functions[9] = (Function)push;
            *functions[11] = (Function)pop;
            return out != NULL;
        }
    "#;

    #[test]
    #[ignore = "run by a_profiler_sees_ranges_by_their_names, within a profiler"]
    fn open_ranges_for_a_profiler() {
        let _load = Named::new("load");
        drop(Named::new("apply"));
    }

    #[test]
    fn a_profiler_sees_ranges_by_their_names() {
        let home = tempfile::tempdir().unwrap();
        let [source, library, seen] = ["profiler.c", "profiler.so", "seen"].map(|n| home.path().join(n));
        std::fs::write(&source, PROFILER).unwrap();
        let built =
            Command::new("cc").args(["-shared", "-fPIC", "-w", "-o"]).arg(&library).arg(&source).status();
        assert!(built.unwrap().success());
        let told = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "cuda::nvtx::tests::open_ranges_for_a_profiler", "--ignored"])
            .env("NVTX_INJECTION64_PATH", &library)
            .env("RANGES_SEEN", &seen)
            .output()
            .unwrap();
        assert!(told.status.success(), "{}", String::from_utf8_lossy(&told.stdout));
        let seen = std::fs::read_to_string(&seen).unwrap();
        assert_eq!(seen, "begin windlass load\nbegin windlass apply\nend\nend\n");
    }

    #[test]
    fn ranges_without_a_profiler_do_nothing() {
        let outer = Named::new("outer");
        drop(Named::new("inner"));
        drop(outer);
    }
}
