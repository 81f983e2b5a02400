//! The streaming chunker. Its rules are in the module doc of [`crate::chunk`].

use std::collections::HashSet;
use std::mem;

use serde::{Deserialize, Serialize};

use super::{ChunkError, Item, WeightChunk};

/// The default of `weight_transfer_threshold_cuda_ipc_GB`.
pub const DEFAULT_THRESHOLD_GB: f64 = 1.0;

/// Converts `weight_transfer_threshold_cuda_ipc_GB` to bytes. The unit is 1024^3 bytes, as in the trainers
/// that have this setting.
pub fn threshold_from_gb(gb: f64) -> Result<u64, ChunkError> {
    let bytes = gb * f64::from(1 << 30);
    // 2^64 is exact as a float; a NaN is in no range. Less than one byte is no threshold.
    if (1.0..18_446_744_073_709_551_616.0).contains(&bytes) {
        Ok(bytes as u64)
    } else {
        Err(ChunkError::Threshold { gb })
    }
}

/// Which parameters travel together. The default is neither grouping nor batching: one parameter per chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ChunkConfig {
    /// Keep a consecutive run of one module's parameters together.
    pub group_by_module: bool,
    /// Join groups (or single parameters) up to this many bytes. With 0, as with `None`, nothing is joined.
    pub batch_threshold_bytes: Option<u64>,
}

/// The module of a parameter: its name without the last two dotted parts, or `None` where the name has
/// fewer than three parts or nothing remains, and the parameter is a module of its own.
pub fn module_of(name: &str) -> Option<&str> {
    name.rsplitn(3, '.').nth(2).filter(|module| !module.is_empty())
}

/// Parameters collected so far, and how many groups they are.
#[derive(Debug)]
struct Pending<T> {
    items: Vec<Item<T>>,
    bytes: u64,
    groups: usize,
}

impl<T> Pending<T> {
    const fn new() -> Pending<T> {
        Pending { items: Vec::new(), bytes: 0, groups: 0 }
    }

    fn take(&mut self) -> Pending<T> {
        mem::replace(self, Pending::new())
    }

    /// The chunk that these parameters are. A lone group of a grouping chunker names its module.
    fn into_chunk(self, grouping: bool) -> WeightChunk<T> {
        let module_name = match self.items.first() {
            Some(item) if grouping && self.groups == 1 => {
                Some(module_of(item.name()).unwrap_or(item.name()).to_owned())
            }
            _ => None,
        };
        WeightChunk { items: self.items, module_name, total_size_bytes: self.bytes }
    }
}

/// Turns a stream of parameters into chunks: push one, take the chunks that are finished, and flush the rest
/// with [`Chunker::finish`].
///
/// A refused push drops the refused parameter and nothing else.
#[derive(Debug)]
pub struct Chunker<T = ()> {
    config: ChunkConfig,
    /// Whole groups that may still be joined by others.
    batch: Pending<T>,
    /// The group that is still growing.
    group: Pending<T>,
    seen: HashSet<String>,
}

impl<T> Chunker<T> {
    /// A chunker for one stream.
    pub fn new(config: ChunkConfig) -> Chunker<T> {
        Chunker { config, batch: Pending::new(), group: Pending::new(), seen: HashSet::new() }
    }

    /// Bytes held back until later pushes or [`Chunker::finish`].
    pub fn pending_bytes(&self) -> u64 {
        // Both parts fit into one chunk (invariant 4), whose total was checked.
        self.batch.bytes.saturating_add(self.group.bytes)
    }

    #[cfg(test)]
    fn pending_len(&self) -> usize {
        self.batch.items.len() + self.group.items.len()
    }

    /// Takes the next parameter and gives back the chunks that it completes, in order.
    pub fn push(&mut self, item: Item<T>) -> Result<Vec<WeightChunk<T>>, ChunkError> {
        let joins = self.joins_group(&item);
        let group_bytes = if joins { self.group.bytes } else { 0 };
        let group_bytes = group_bytes
            .checked_add(item.bytes())
            .ok_or_else(|| ChunkError::TotalOverflow { name: item.name().to_owned() })?;
        if !self.seen.insert(item.name().to_owned()) {
            return Err(ChunkError::Duplicate { name: item.name().to_owned() });
        }

        let mut done = Vec::new();
        if !joins {
            self.close_group(&mut done);
        }
        self.group.items.push(item);
        self.group.bytes = group_bytes;
        self.group.groups = 1;
        // A group only grows: one that already does not fit will not fit later.
        if self.batch.bytes.checked_add(group_bytes).is_none_or(|bytes| bytes > self.limit()) {
            self.flush_batch(&mut done);
        }
        if !self.config.group_by_module {
            self.close_group(&mut done);
        }
        Ok(done)
    }

    /// Ends the stream: the held parameters become the last chunk.
    pub fn finish(mut self) -> Vec<WeightChunk<T>> {
        let mut done = Vec::new();
        self.close_group(&mut done);
        self.flush_batch(&mut done);
        done
    }

    /// Without a threshold, which is the same as a threshold of 0, nothing is joined.
    fn limit(&self) -> u64 {
        self.config.batch_threshold_bytes.unwrap_or(0)
    }

    fn joins_group(&self, item: &Item<T>) -> bool {
        let open = self.group.items.last().and_then(|last| module_of(last.name()));
        self.config.group_by_module && open.is_some() && open == module_of(item.name())
    }

    fn close_group(&mut self, done: &mut Vec<WeightChunk<T>>) {
        let group = self.group.take();
        if group.items.is_empty() {
            return;
        }
        // `push` has flushed a batch that this group does not fit into.
        self.batch.bytes += group.bytes;
        self.batch.groups += group.groups;
        if self.batch.items.is_empty() {
            self.batch.items = group.items;
        } else {
            self.batch.items.extend(group.items);
        }
        if self.batch.bytes >= self.limit() {
            self.flush_batch(done);
        }
    }

    fn flush_batch(&mut self, done: &mut Vec<WeightChunk<T>>) {
        let batch = self.batch.take();
        if !batch.items.is_empty() {
            done.push(batch.into_chunk(self.config.group_by_module));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;
    use proptest::prelude::*;

    const GIB: u64 = 1 << 30;

    fn item(name: &str, bytes: u64, payload: usize) -> Item<usize> {
        Item::new(name, Dtype::U8, vec![bytes], bytes, payload).unwrap()
    }

    fn config(group_by_module: bool, batch_threshold_bytes: Option<u64>) -> ChunkConfig {
        ChunkConfig { group_by_module, batch_threshold_bytes }
    }

    fn run(config: ChunkConfig, items: &[(&str, u64)]) -> Vec<WeightChunk<usize>> {
        let mut chunker = Chunker::new(config);
        let mut chunks = Vec::new();
        for (i, (name, bytes)) in items.iter().enumerate() {
            chunks.extend(chunker.push(item(name, *bytes, i)).unwrap());
        }
        chunks.extend(chunker.finish());
        chunks
    }

    #[test]
    fn by_default_each_parameter_is_a_chunk_and_leaves_at_once() {
        let mut chunker = Chunker::new(ChunkConfig::default());
        for (i, name) in ["a.b.q.weight", "a.b.k.weight", "empty.x.y"].into_iter().enumerate() {
            let chunks = chunker.push(item(name, i as u64, i)).unwrap();
            assert_eq!(chunks.len(), 1);
            assert_eq!((chunks[0].len(), chunks[0].module_name()), (1, None));
            assert_eq!(chunker.pending_len(), 0);
        }
        assert!(chunker.finish().is_empty());
    }

    #[test]
    fn the_module_of_a_parameter_is_its_name_without_the_last_two_parts() {
        assert_eq!(module_of("model.layers.0.self_attn.q_proj.weight"), Some("model.layers.0.self_attn"));
        assert_eq!(module_of("model.layers.0.self_attn.k_proj.bias"), Some("model.layers.0.self_attn"));
        assert_eq!(module_of("model.norm.weight"), Some("model"));
        for alone in ["lm_head.weight", "scale", "", ".", "..", ".q.weight", "a."] {
            assert_eq!(module_of(alone), None, "{alone:?}");
        }
    }

    #[test]
    fn parameters_without_a_module_are_not_grouped_with_each_other() {
        let chunks = run(config(true, None), &[("lm_head.weight", 1), ("score.weight", 1), ("scale", 1)]);
        let modules: Vec<_> = chunks.iter().map(WeightChunk::module_name).collect();
        assert_eq!(modules, [Some("lm_head.weight"), Some("score.weight"), Some("scale")]);
        // Nor with a module that happens to have the parameter's full name.
        assert_eq!(run(config(true, None), &[("lm_head.weight", 1), ("lm_head.weight.a.b", 1)]).len(), 2);
    }

    #[test]
    fn a_module_that_reappears_starts_a_new_group() {
        let chunks =
            run(config(true, None), &[("m.a.q.w", 1), ("m.a.k.w", 1), ("m.b.q.w", 1), ("m.a.v.w", 1)]);
        let got: Vec<_> = chunks.iter().map(|c| (c.module_name(), c.len())).collect();
        assert_eq!(got, [(Some("m.a"), 2), (Some("m.b"), 1), (Some("m.a"), 1)]);
    }

    #[test]
    fn a_batch_is_flushed_before_it_exceeds_the_threshold() {
        let sizes = |chunks: Vec<WeightChunk<usize>>| -> Vec<u64> {
            chunks.iter().map(WeightChunk::total_size_bytes).collect()
        };
        assert_eq!(sizes(run(config(false, Some(10)), &[("a", 4), ("b", 4), ("c", 4)])), [8, 4]);
        assert_eq!(sizes(run(config(false, Some(10)), &[("a", 4), ("b", 6), ("c", 1)])), [10, 1]);
        assert_eq!(sizes(run(config(false, Some(10)), &[("a", 4), ("b", 7), ("c", 3)])), [4, 10]);
    }

    #[test]
    fn a_parameter_larger_than_the_threshold_travels_alone() {
        let chunks = run(config(false, Some(10)), &[("a", 1), ("big", 11), ("empty", 0), ("b", 1)]);
        let names: Vec<Vec<_>> = chunks.iter().map(|c| c.names().collect()).collect();
        assert_eq!(names, [vec!["a"], vec!["big"], vec!["empty", "b"]]);
    }

    #[test]
    fn a_module_larger_than_the_threshold_is_not_split() {
        let items = [("m.a.q.w", 4), ("m.b.q.w", 6), ("m.b.k.w", 6), ("m.b.v.w", 6), ("m.c.q.w", 4)];
        let chunks = run(config(true, Some(10)), &items);
        let got: Vec<_> = chunks.iter().map(|c| (c.module_name(), c.len(), c.total_size_bytes())).collect();
        assert_eq!(got, [(Some("m.a"), 1, 4), (Some("m.b"), 3, 18), (Some("m.c"), 1, 4)]);
    }

    #[test]
    fn a_chunk_of_several_modules_names_none() {
        let items = [("m.a.q.w", 2), ("m.a.k.w", 2), ("m.b.q.w", 2), ("m.c.q.w", 9)];
        let chunks = run(config(true, Some(10)), &items);
        let got: Vec<_> = chunks.iter().map(|c| (c.module_name(), c.len())).collect();
        assert_eq!(got, [(None, 3), (Some("m.c"), 1)]);
    }

    #[test]
    fn a_parameter_that_comes_twice_is_refused_and_nothing_is_lost() {
        let mut chunker = Chunker::new(config(true, None));
        assert!(chunker.push(item("m.a.q.w", 1, 0)).unwrap().is_empty());
        assert_eq!(chunker.push(item("m.b.q.w", 1, 1)).unwrap().len(), 1);
        let error = chunker.push(item("m.a.q.w", 1, 2)).unwrap_err();
        assert_eq!(error, ChunkError::Duplicate { name: "m.a.q.w".into() });
        let rest = chunker.finish();
        assert_eq!((rest.len(), rest[0].module_name()), (1, Some("m.b")));
    }

    #[test]
    fn a_group_whose_size_overflows_is_refused_and_nothing_is_lost() {
        let mut chunker = Chunker::new(config(true, Some(10)));
        for i in 0..15 {
            assert!(chunker.push(item(&format!("m.a.p{i}.w"), 1 << 60, i)).unwrap().is_empty());
        }
        let refused = chunker.push(item("m.a.last.w", 1 << 60, 15)).unwrap_err();
        assert_eq!(refused, ChunkError::TotalOverflow { name: "m.a.last.w".into() });
        assert_eq!(chunker.finish()[0].total_size_bytes(), 15 << 60);
    }

    #[test]
    fn a_batch_whose_total_would_overflow_is_flushed() {
        let items: Vec<_> = (0..17).map(|i| (format!("p{i}"), 1 << 60)).collect();
        let sizes: Vec<_> =
            feed(config(false, Some(u64::MAX)), &items).iter().map(WeightChunk::total_size_bytes).collect();
        assert_eq!(sizes, [15 << 60, 2 << 60]);
    }

    #[test]
    fn the_threshold_in_gb_counts_units_of_1024_cubed() {
        assert_eq!(threshold_from_gb(DEFAULT_THRESHOLD_GB), Ok(GIB));
        assert_eq!(threshold_from_gb(0.5), Ok(GIB / 2));
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e-12, 1.8e10] {
            assert!(matches!(threshold_from_gb(bad), Err(ChunkError::Threshold { .. })), "{bad}");
        }
        assert!(threshold_from_gb(1.7e10).is_ok());
    }

    /// Streams of short runs over few modules, so that modules reappear, with sizes around the threshold.
    fn streams() -> impl Strategy<Value = (ChunkConfig, Vec<(String, u64)>)> {
        let module = prop_oneof![Just(""), Just("m"), Just("m.a"), Just("m.b")];
        let items = prop::collection::vec((module, 1..4usize, 0..14u64), 0..24);
        (any::<bool>(), prop::option::of(0..24u64), items).prop_map(|(group, threshold, runs)| {
            let mut items: Vec<(String, u64)> = Vec::new();
            for (module, length, bytes) in runs {
                for _ in 0..length {
                    let i = items.len();
                    let name = if module.is_empty() { format!("p{i}.w") } else { format!("{module}.p{i}.w") };
                    items.push((name, bytes));
                }
            }
            (config(group, threshold), items)
        })
    }

    /// The groups of a stream, computed the plain way: sizes of consecutive runs.
    fn groups(config: ChunkConfig, items: &[(String, u64)]) -> Vec<Vec<usize>> {
        let mut groups: Vec<Vec<usize>> = Vec::new();
        for (i, (name, _)) in items.iter().enumerate() {
            let module = module_of(name);
            match groups.last_mut() {
                Some(g)
                    if config.group_by_module && module.is_some() && module == module_of(&items[i - 1].0) =>
                {
                    g.push(i);
                }
                _ => groups.push(vec![i]),
            }
        }
        groups
    }

    fn feed(config: ChunkConfig, items: &[(String, u64)]) -> Vec<WeightChunk<usize>> {
        let items: Vec<_> = items.iter().map(|(n, b)| (n.as_str(), *b)).collect();
        run(config, &items)
    }

    fn indices(chunk: &WeightChunk<usize>) -> Vec<usize> {
        chunk.iter().map(|i| *i.payload()).collect()
    }

    proptest! {
        #[test]
        fn chunks_in_order_are_the_input_in_order((config, items) in streams()) {
            let chunks = feed(config, &items);
            let got: Vec<_> = chunks.iter().flat_map(|c| c.iter())
                .map(|i| (i.name().to_owned(), i.bytes())).collect();
            let totals: u64 = chunks.iter().map(WeightChunk::total_size_bytes).sum();
            prop_assert_eq!(totals, items.iter().map(|(_, b)| b).sum::<u64>());
            prop_assert_eq!(got, items);
        }

        #[test]
        fn a_chunk_exceeds_the_threshold_only_as_a_single_group((config, items) in streams()) {
            let groups = groups(config, &items);
            for chunk in feed(config, &items) {
                let single = groups.contains(&indices(&chunk));
                let limit = config.batch_threshold_bytes.unwrap_or(0);
                prop_assert!(single || chunk.total_size_bytes() <= limit);
                prop_assert_eq!(chunk.module_name().is_some(), single && config.group_by_module);
            }
        }

        #[test]
        fn a_run_of_one_module_is_never_split((config, items) in streams()) {
            let chunks: Vec<_> = feed(config, &items).iter().map(indices).collect();
            for group in groups(config, &items) {
                prop_assert!(chunks.iter().any(|c| group.iter().all(|i| c.contains(i))), "{:?}", group);
            }
        }

        #[test]
        fn what_the_chunker_holds_fits_into_one_chunk((config, items) in streams()) {
            let groups = groups(config, &items);
            let mut chunker = Chunker::new(config);
            let mut emitted = 0;
            for (i, (name, bytes)) in items.iter().enumerate() {
                emitted += chunker.push(item(name, *bytes, i)).unwrap().iter().map(WeightChunk::len).sum::<usize>();
                prop_assert_eq!(chunker.pending_len(), i + 1 - emitted);
                let held: u64 = items[emitted..=i].iter().map(|(_, b)| b).sum();
                prop_assert_eq!(chunker.pending_bytes(), held);
                let part_of_one_group = groups.iter().any(|g| (emitted..=i).all(|j| g.contains(&j)));
                prop_assert!(part_of_one_group || held <= config.batch_threshold_bytes.unwrap_or(0));
            }
        }

        #[test]
        fn a_batch_is_flushed_only_when_the_next_group_does_not_fit((config, items) in streams()) {
            let Some(limit) = config.batch_threshold_bytes else { return Ok(()) };
            let groups = groups(config, &items);
            let chunks = feed(config, &items);
            for pair in chunks.windows(2) {
                let first = indices(&pair[1])[0];
                let next = groups.iter().find(|g| g[0] == first).unwrap();
                let next: u64 = next.iter().map(|&i| items[i].1).sum();
                let full = pair[0].total_size_bytes() >= limit;
                prop_assert!(full || pair[0].total_size_bytes() + next > limit);
            }
        }
    }
}
