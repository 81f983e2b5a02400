//! The parameters of a request: names, dtypes and shapes that agree.

use std::collections::HashSet;

use serde_json::{Map, Value, json};

use super::{Fields, LORA_DISK_LOAD, MAX_PARAMETERS, RequestError};
use crate::chunk::Extent;
use crate::dtype::Dtype;
use crate::error::excerpt;

/// Names, dtypes and shapes, one entry per parameter in each; no name twice, none empty, every size known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameters {
    names: Vec<String>,
    dtypes: Vec<Dtype>,
    shapes: Vec<Vec<u64>>,
    extents: Vec<Extent>,
}

impl Parameters {
    /// Checks the columns against each other.
    pub fn new(
        names: Vec<String>,
        dtypes: Vec<Dtype>,
        shapes: Vec<Vec<u64>>,
    ) -> Result<Parameters, RequestError> {
        check_count(names.len())?;
        check_lengths("dtypes", names.len(), dtypes.len())?;
        check_lengths("shapes", names.len(), shapes.len())?;
        check_names(&names)?;
        let mut extents = Vec::with_capacity(names.len());
        for ((name, &dtype), shape) in names.iter().zip(&dtypes).zip(&shapes) {
            extents.push(Extent::of(dtype, shape).map_err(|source| RequestError::Extent {
                name: excerpt(name),
                dtype,
                shape: shape.iter().copied().take(16).collect(),
                source,
            })?);
        }
        Ok(Parameters { names, dtypes, shapes, extents })
    }

    /// The number of parameters; never 0.
    #[expect(clippy::len_without_is_empty, reason = "a request is never empty")]
    pub fn len(&self) -> usize {
        self.names.len()
    }

    /// Names in order.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Dtypes in order.
    pub fn dtypes(&self) -> &[Dtype] {
        &self.dtypes
    }

    /// Shapes in order.
    pub fn shapes(&self) -> &[Vec<u64>] {
        &self.shapes
    }

    /// Sizes in order, computed from dtype and shape.
    pub fn extents(&self) -> &[Extent] {
        &self.extents
    }

    /// The parameters one by one.
    pub(super) fn each(&self) -> impl Iterator<Item = (&str, Dtype, &[u64], Extent)> {
        self.names
            .iter()
            .zip(&self.dtypes)
            .zip(&self.shapes)
            .zip(&self.extents)
            .map(|(((name, &dtype), shape), &extent)| (name.as_str(), dtype, shape.as_slice(), extent))
    }

    /// Reads the three columns. Lengths are compared before anything is copied.
    pub(super) fn read(fields: &Fields<'_>) -> Result<Parameters, RequestError> {
        let (names, dtypes) = (fields.list("names")?, fields.list("dtypes")?);
        let shapes = fields.list("shapes")?;
        let count = names.values.len();
        check_count(count)?;
        check_lengths("dtypes", count, dtypes.values.len())?;
        check_lengths("shapes", count, shapes.values.len())?;
        let names = names.texts()?.into_iter().map(str::to_owned).collect();
        let parse = |(index, text): (usize, &str)| {
            text.parse::<Dtype>().map_err(|source| RequestError::Dtype { index, source })
        };
        let dtypes = dtypes.texts()?.into_iter().enumerate().map(parse).collect::<Result<_, _>>()?;
        Parameters::new(names, dtypes, shapes.shapes()?)
    }

    /// Writes the three columns.
    pub(super) fn write(&self, into: &mut Map<String, Value>) {
        into.insert("names".to_owned(), json!(self.names));
        into.insert("dtypes".to_owned(), json!(self.dtypes));
        into.insert("shapes".to_owned(), json!(self.shapes));
    }
}

fn check_count(count: usize) -> Result<(), RequestError> {
    match count {
        0 => Err(RequestError::NoParameters),
        1..=MAX_PARAMETERS => Ok(()),
        _ => Err(RequestError::TooManyParameters { count }),
    }
}

/// One entry of `field` per parameter.
pub(super) fn check_lengths(field: &'static str, expected: usize, got: usize) -> Result<(), RequestError> {
    if got == expected { Ok(()) } else { Err(RequestError::Lengths { field, expected, got }) }
}

fn check_names(names: &[String]) -> Result<(), RequestError> {
    let mut seen = HashSet::with_capacity(names.len());
    for (index, name) in names.iter().enumerate() {
        if name.is_empty() {
            return Err(RequestError::EmptyName { index });
        }
        if name == LORA_DISK_LOAD {
            return Err(RequestError::ReservedName);
        }
        if !seen.insert(name.as_str()) {
            return Err(RequestError::DuplicateName { name: excerpt(name), index });
        }
    }
    Ok(())
}
