//! Slices: the part of a model that one engine host needs.
//!
//! Owns: [`Selection`], which names parts of tensors, and the blocks of a manifest that they touch. A receiver of a slice
//! pulls and keeps these blocks alone, and proves them by a digest of their own: the state sum of its blocks
//! ([`crate::digest::SumTable::state_of`]) in place of the sum of all. Called by receivers, and by workers that
//! say what their load plans read. Must not: know where the bytes are.
//!
//! # The document
//!
//! ```text
//! {"model.layers.0.*": [[]],                              tensors whole
//!  "lm_head.weight": [[[0, 64000]]],                      rows 0 to 64,000
//!  "model.layers.*.down_proj.weight": [[null, [0, 7168]]], columns 0 to 7,168 of all rows
//!  "qkv.weight": [[[0, 512]], [[1024, 1152]]]}            two boxes
//! ```
//!
//! A key is the name of a tensor, or a pattern in which `*` stands for any number of any characters. Its value lists boxes:
//! for each dimension, outermost first, `[start, end]` or `null` for all of it; dimensions that are left out are
//! taken whole. Every pattern must match a tensor, and every box must lie inside the tensors that its pattern matches.
//!
//! # From boxes to blocks
//!
//! A block belongs to the selection if at least one of its units does. So a slice may hold more than was named, up to
//! one block at each end of a range of rows. Columns are cut out only where the publisher's cut table has boundaries
//! between columns; otherwise every block of the tensor has some of them, and all are kept.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::error::{Kind, excerpt};
use crate::manifest::{Block, Manifest, ManifestError, Tensor};
use crate::ranges::BlockRanges;

/// The most patterns of a selection.
const MAX_PATTERNS: usize = 1_000_000;

/// A selection that cannot be read, or does not fit a model.
#[derive(Debug, thiserror::Error)]
pub enum SliceError {
    #[error(
        "not a valid selection: {0}; expected names or patterns, each with a list of boxes, such as {{\"lm_head.weight\": [[[0, 64000]]]}}"
    )]
    Json(serde_json::Error),
    #[error("a selection has 1 to {MAX_PATTERNS} patterns, this one {count}")]
    Patterns { count: usize },
    #[error("{pattern:?} matches no tensor of the model: correct it, or leave it out")]
    NoMatch { pattern: String },
    #[error(
        "{pattern:?} lists no box: write [[]] for whole tensors, or leave the pattern out if nothing of them is needed"
    )]
    NoBox { pattern: String },
    #[error("{pattern:?} has a box of {given} dimensions, but tensor {tensor:?} has shape {shape:?}")]
    Rank { pattern: String, tensor: String, shape: Vec<u64>, given: usize },
    #[error(
        "{pattern:?} selects {start} to {end} of dimension {dim}, but tensor {tensor:?} has shape {shape:?}: \
         expected start < end <= {size}"
    )]
    Range { pattern: String, tensor: String, shape: Vec<u64>, dim: usize, start: u64, end: u64, size: u64 },
    #[error("the selection covers nothing: all tensors that it names are empty")]
    Nothing,
    #[error(transparent)]
    Manifest(#[from] ManifestError),
}

impl SliceError {
    /// The kind of failure (see [`crate::error`]).
    pub fn kind(&self) -> Kind {
        match self {
            SliceError::Manifest(e) => e.kind(),
            _ => Kind::Invalid,
        }
    }
}

/// For each dimension, outermost first, what is taken of it.
type Extents = Vec<Option<(u64, u64)>>;

/// Parts of the tensors of a model, by name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Selection(BTreeMap<String, Vec<Extents>>);

impl Selection {
    /// Reads the document.
    pub fn from_json(json: &[u8]) -> Result<Selection, SliceError> {
        let selection: Selection = serde_json::from_slice(json).map_err(SliceError::Json)?;
        let count = selection.0.len();
        if !(1..=MAX_PATTERNS).contains(&count) {
            return Err(SliceError::Patterns { count });
        }
        match selection.0.iter().find(|(_, boxes)| boxes.is_empty()) {
            Some((pattern, _)) => Err(SliceError::NoBox { pattern: excerpt(pattern) }),
            None => Ok(selection),
        }
    }

    /// The blocks of `manifest` that the selection touches.
    pub fn blocks(&self, manifest: &Manifest) -> Result<BlockRanges, SliceError> {
        let mut runs: Vec<Range<u32>> = Vec::new();
        for (pattern, boxes) in &self.0 {
            let mut matched = false;
            for index in matching(manifest, pattern) {
                matched = true;
                let tensor = &manifest.tensors()[index];
                for given in boxes {
                    let bounds = bounds(pattern, tensor, given)?;
                    touched(manifest, index, &bounds, &mut runs)?;
                }
            }
            if !matched {
                return Err(SliceError::NoMatch { pattern: excerpt(pattern) });
            }
        }
        let blocks: BlockRanges = runs.into_iter().collect();
        if blocks.is_empty() { Err(SliceError::Nothing) } else { Ok(blocks) }
    }
}

/// The tensors that a name or a pattern is for, also by their aliases.
fn matching<'m>(manifest: &'m Manifest, pattern: &'m str) -> impl Iterator<Item = usize> + 'm {
    let one = if pattern.contains('*') { None } else { manifest.find(pattern) };
    let tensors = manifest.tensors().iter().enumerate();
    let by_name = tensors.filter(|(_, t)| matches(pattern, &t.name)).map(|(i, _)| i);
    let aliases = manifest.aliases().keys().filter(|alias| matches(pattern, alias));
    let by_alias = aliases.filter_map(|alias| manifest.find(alias));
    let many = pattern.contains('*');
    one.into_iter().chain(by_name.filter(move |_| many)).chain(by_alias.filter(move |_| many))
}

/// Whether `name` is what `pattern` says; `*` stands for any number of any characters.
fn matches(pattern: &str, name: &str) -> bool {
    let mut pieces = pattern.split('*');
    let first = pieces.next().unwrap_or_default();
    let Some(mut rest) = name.strip_prefix(first) else { return false };
    let Some(last) = pieces.next_back() else { return rest.is_empty() };
    for piece in pieces {
        // The leftmost place leaves the most for what follows.
        let Some(at) = rest.find(piece) else { return false };
        rest = &rest[at + piece.len()..];
    }
    rest.ends_with(last)
}

/// A box of `tensor`, with the dimensions that were left out.
fn bounds(pattern: &str, tensor: &Tensor, given: &Extents) -> Result<Vec<Range<u64>>, SliceError> {
    let shape = &tensor.shape;
    let named = || (excerpt(pattern), tensor.name.clone(), shape.clone());
    if given.len() > shape.len() {
        let (pattern, tensor, shape) = named();
        return Err(SliceError::Rank { pattern, tensor, shape, given: given.len() });
    }
    let whole = |dim: usize| 0..shape[dim];
    (0..shape.len())
        .map(|dim| match given.get(dim).copied().flatten() {
            None => Ok(whole(dim)),
            Some((start, end)) if start < end && end <= shape[dim] => Ok(start..end),
            Some((start, end)) => {
                let (pattern, tensor, shape) = named();
                let size = shape[dim];
                Err(SliceError::Range { pattern, tensor, shape, dim, start, end, size })
            }
        })
        .collect()
}

/// Adds the blocks of a tensor that have a unit in the box.
fn touched(
    manifest: &Manifest,
    index: usize,
    bounds: &[Range<u64>],
    runs: &mut Vec<Range<u32>>,
) -> Result<(), SliceError> {
    let tensor = &manifest.tensors()[index];
    let all = manifest.cuts().of_tensor(index);
    if bounds.iter().zip(&tensor.shape).all(|(b, size)| *b == (0..*size)) {
        runs.push(all);
        return Ok(());
    }
    for number in all {
        if holds_any(tensor, &manifest.cuts().block(number)?, bounds) {
            match runs.last_mut() {
                Some(last) if last.end == number => last.end += 1,
                Some(_) | None => runs.push(number..number + 1),
            }
        }
    }
    Ok(())
}

/// Whether a block has an element of the box.
fn holds_any(tensor: &Tensor, block: &Block, bounds: &[Range<u64>]) -> bool {
    let elements: u64 = tensor.shape.iter().product();
    // A unit of a packed dtype has several elements.
    let per_unit = elements / tensor.units().max(1);
    block.runs().any(|start| {
        let (first, end) = (start * per_unit, (start + block.run) * per_unit);
        next_inside(&tensor.shape, bounds, first).is_some_and(|found| found < end)
    })
}

/// The first element of the box from `at` on, as a number in row-major order.
fn next_inside(shape: &[u64], bounds: &[Range<u64>], at: u64) -> Option<u64> {
    let mut index = vec![0; shape.len()];
    let mut rest = at;
    for (place, size) in index.iter_mut().zip(shape).rev() {
        (*place, rest) = (rest % size, rest / size);
    }
    // From the outside in: the first dimension that leaves the box decides.
    for dim in 0..shape.len() {
        if index[dim] < bounds[dim].start {
            return Some(corner(shape, bounds, &index, dim, bounds[dim].start));
        }
        if index[dim] >= bounds[dim].end {
            // The next step of an outer dimension that stays in the box.
            let outer = (0..dim).rev().find(|d| index[*d] + 1 < bounds[*d].end)?;
            return Some(corner(shape, bounds, &index, outer, index[outer] + 1));
        }
    }
    Some(at)
}

/// The number of the element with `index` before `dim`, `at` in `dim`, and the first of the box after it.
fn corner(shape: &[u64], bounds: &[Range<u64>], index: &[u64], dim: usize, at: u64) -> u64 {
    (0..shape.len()).fold(0, |number, d| {
        let place = match d.cmp(&dim) {
            std::cmp::Ordering::Less => index[d],
            std::cmp::Ordering::Equal => at,
            std::cmp::Ordering::Greater => bounds[d].start,
        };
        number * shape[d] + place
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::dtype::Dtype;
    use crate::manifest::{BLOCK_UNITS, DimCut, TensorSpec};

    fn model() -> Manifest {
        let specs = [
            TensorSpec::new("layers.0.up.weight", Dtype::BF16, [1024, 256]),
            TensorSpec::new("layers.0.down.weight", Dtype::BF16, [256, 1024]),
            TensorSpec::new("layers.1.up.weight", Dtype::BF16, [1024, 256]),
            TensorSpec::new("layers.10.up.weight", Dtype::BF16, [4, 4]),
            TensorSpec::new("empty", Dtype::BF16, [0, 7]),
        ];
        let cuts =
            BTreeMap::from([("layers.0.down.weight".to_owned(), vec![DimCut { dim: 1, bounds: vec![512] }])]);
        let aliases = BTreeMap::from([("tied.weight".to_owned(), "layers.1.up.weight".to_owned())]);
        Manifest::new(specs, aliases).unwrap().with_cuts(&cuts).unwrap()
    }

    fn blocks(json: &str) -> Result<Vec<(String, u32)>, SliceError> {
        let m = model();
        let blocks = Selection::from_json(json.as_bytes())?.blocks(&m)?;
        let tensor = |b| &m.tensors()[m.cuts().block(b).unwrap().tensor as usize].name;
        let first = |b| m.cuts().of_tensor(m.cuts().block(b).unwrap().tensor as usize).start;
        Ok(blocks.iter().map(|b| (tensor(b).clone(), b - first(b))).collect())
    }

    #[test]
    fn names_patterns_rows_and_columns_select_blocks() {
        let names = |found: Vec<(String, u32)>| {
            found.into_iter().map(|(n, b)| format!("{n}:{b}")).collect::<Vec<_>>().join(" ")
        };
        let of = |json| names(blocks(json).unwrap());
        assert_eq!(of(r#"{"layers.10.up.weight": [[]]}"#), "layers.10.up.weight:0");
        // A tensor of 1,024 rows of 256 has four blocks of 256 rows.
        assert_eq!(of(r#"{"layers.0.up.*": [[[255, 257]]]}"#), "layers.0.up.weight:0 layers.0.up.weight:1");
        assert_eq!(of(r#"{"tied.*": [[[1023, 1024], [0, 1]]]}"#), "layers.1.up.weight:3");
        // Cut between columns: each half has two blocks of 128 rows.
        let half = "layers.0.down.weight:2 layers.0.down.weight:3";
        assert_eq!(of(r#"{"layers.0.down.weight": [[null, [512, 1024]]]}"#), half);
        // Not cut: all of them have the columns.
        assert_eq!(blocks(r#"{"layers.0.up.weight": [[null, [0, 1]]]}"#).unwrap().len(), 4);
        assert_eq!(blocks(r#"{"*": [[]]}"#).unwrap().len(), 13);
        assert_eq!(blocks(r#"{"layers.*.up.weight": [[[0, 4], [0, 4]]]}"#).unwrap().len(), 3);
    }

    #[test]
    fn what_does_not_fit_the_model_is_named() {
        let error = |json: &str| blocks(json).unwrap_err().to_string();
        let has = |json, part: &str| {
            let text = error(json);
            assert!(text.contains(part), "{text}");
        };
        has("[]", "not a valid selection");
        has("{}", "1 to 1000000 patterns");
        has(r#"{"*.gate": [[]]}"#, r#""*.gate" matches no tensor"#);
        has(r#"{"*": []}"#, "write [[]] for whole tensors");
        has(r#"{"empty": [[]]}"#, "covers nothing");
        has(r#"{"layers.0.up.weight": [[null, null, [0, 1]]]}"#, "a box of 3 dimensions");
        has(r#"{"layers.0.up.weight": [[[0, 1025]]]}"#, "start < end <= 1024");
        has(r#"{"layers.0.up.weight": [[[5, 5]]]}"#, "5 to 5 of dimension 0");
    }

    #[test]
    fn a_star_stands_for_any_number_of_characters() {
        for (pattern, name, fits) in [
            ("a", "a", true),
            ("a", "ab", false),
            ("*", "", true),
            ("a*", "a", true),
            ("*.w", "x.y.w", true),
            ("*.w", "w", false),
            ("a*b*c", "aXbXbXc", true),
            ("a*b*c", "aXbXbX", false),
            ("a*a", "a", false),
            ("a**b", "ab", true),
        ] {
            assert_eq!(matches(pattern, name), fits, "{pattern} {name}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        /// The same as looking at every element.
        #[test]
        fn a_block_is_selected_if_one_of_its_elements_is(
            shape in prop::collection::vec(1u64..40, 1..4),
            ends in prop::collection::vec((any::<u64>(), any::<u64>()), 3),
            cut in any::<prop::sample::Index>(),
        ) {
            let wide: Vec<u64> = shape.iter().enumerate().map(|(i, d)| if i == 0 { d * 97 } else { *d * 3 }).collect();
            prop_assume!(wide.iter().product::<u64>() < 4 * BLOCK_UNITS);
            let bounds: Vec<Range<u64>> = wide.iter().zip(&ends).map(|(size, (a, b))| {
                let start = a % size;
                start..start + 1 + b % (size - start)
            }).collect();
            let dim = cut.index(wide.len());
            let cuts = BTreeMap::from([("w".to_owned(), vec![DimCut::chunked(dim, wide[dim], 3)])]);
            let m = Manifest::new([TensorSpec::new("w", Dtype::U8, wide.clone())], BTreeMap::new()).unwrap();
            let m = m.with_cuts(&cuts).unwrap();
            let given: Extents = bounds.iter().map(|b| Some((b.start, b.end))).collect();
            let found = Selection(BTreeMap::from([("w".to_owned(), vec![given])])).blocks(&m).unwrap();
            let inside = |mut element: u64| wide.iter().zip(&bounds).rev().all(|(size, b)| {
                let place = element % size;
                element /= size;
                b.contains(&place)
            });
            for number in 0..m.cuts().blocks() {
                let block = m.cuts().block(number).unwrap();
                let any = (0..block.units()).any(|u| inside(block.tensor_unit(u)));
                prop_assert_eq!(found.contains(number), any, "block {}", number);
            }
        }
    }
}
