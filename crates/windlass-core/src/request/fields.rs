//! Reading plain data: an object's fields, each by name and type.
//!
//! Used by requests and sync infos instead of derived deserialisers, because a peer in another language
//! needs to hear *which* field is wrong, by a path, and because a value that should have been something
//! else (a token, a handle) must not end up in a message. Messages therefore name paths and JSON types,
//! never values.

use serde_json::{Map, Value};

use crate::error::{Kind, excerpt};

/// A field that is missing, unknown or of the wrong type.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FieldError {
    #[error("{at}: field {field:?} is missing")]
    Missing { at: String, field: &'static str },
    /// A field that nothing reads. Refused, so that a misspelt or unsupported one is not ignored in silence.
    #[error("{at}: field {field:?} does not belong here; expected only {}", expected.join(", "))]
    Unknown {
        at: String,
        field: String,
        /// The fields that may be there.
        expected: &'static [&'static str],
    },
    #[error("{at}: expected {expected}, found {found}")]
    Type { at: String, expected: &'static str, found: &'static str },
}

impl FieldError {
    /// The kind of failure (see [`crate::error`]).
    pub fn kind(&self) -> Kind {
        match self {
            FieldError::Missing { .. } | FieldError::Unknown { .. } | FieldError::Type { .. } => {
                Kind::Invalid
            }
        }
    }

    /// The stable name of the failure, the same in every language.
    pub fn name(&self) -> &'static str {
        match self {
            FieldError::Missing { .. } => "missing_field",
            FieldError::Unknown { .. } => "unknown_field",
            FieldError::Type { .. } => "wrong_type",
        }
    }
}

/// The kind of a JSON value, for messages.
pub(crate) fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(n) if n.is_u64() => "a number",
        Value::Number(n) if n.is_i64() => "a negative number",
        Value::Number(_) => "a fractional number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

fn wrong(at: String, expected: &'static str, found: &Value) -> FieldError {
    FieldError::Type { at, expected, found: type_of(found) }
}

/// The `type` of a tagged object, if it has one.
pub(crate) fn tag<'a>(value: &'a Value, at: &str) -> Result<Option<&'a str>, FieldError> {
    match object(value, at)?.get("type") {
        None => Ok(None),
        Some(Value::String(tag)) => Ok(Some(tag)),
        Some(other) => Err(wrong(format!("{at}.type"), "a string", other)),
    }
}

/// The value as an object.
pub(crate) fn object<'a>(value: &'a Value, at: &str) -> Result<&'a Map<String, Value>, FieldError> {
    value.as_object().ok_or_else(|| wrong(at.to_owned(), "an object", value))
}

/// One object, open for reading; every field it has is known.
pub(crate) struct Fields<'a> {
    map: &'a Map<String, Value>,
    at: String,
}

impl<'a> Fields<'a> {
    /// Opens an object that may have only the `known` fields. `at` is its path, for messages.
    pub(crate) fn open(
        value: &'a Value,
        at: impl Into<String>,
        known: &'static [&'static str],
    ) -> Result<Fields<'a>, FieldError> {
        let at = at.into();
        let map = object(value, &at)?;
        match map.keys().find(|key| !known.contains(&key.as_str())) {
            Some(field) => Err(FieldError::Unknown { at, field: excerpt(field), expected: known }),
            None => Ok(Fields { map, at }),
        }
    }

    /// The path of a field.
    pub(crate) fn path(&self, field: &str) -> String {
        format!("{}.{field}", self.at)
    }

    /// A field that may be absent. JSON's null counts as absent, as Python's `None` does.
    pub(crate) fn optional(&self, field: &str) -> Option<&'a Value> {
        self.map.get(field).filter(|value| !value.is_null())
    }

    /// A field that must be there.
    pub(crate) fn required(&self, field: &'static str) -> Result<&'a Value, FieldError> {
        self.optional(field).ok_or_else(|| FieldError::Missing { at: self.at.clone(), field })
    }

    /// A text.
    pub(crate) fn text(&self, field: &'static str) -> Result<&'a str, FieldError> {
        let value = self.required(field)?;
        value.as_str().ok_or_else(|| wrong(self.path(field), "a string", value))
    }

    /// An unsigned integer.
    pub(crate) fn u64(&self, field: &'static str) -> Result<u64, FieldError> {
        let value = self.required(field)?;
        value.as_u64().ok_or_else(|| wrong(self.path(field), "an integer from 0 to 2^64-1", value))
    }

    /// A boolean that is false when absent.
    pub(crate) fn flag(&self, field: &'static str) -> Result<bool, FieldError> {
        self.optional(field).map_or(Ok(false), |value| {
            value.as_bool().ok_or_else(|| wrong(self.path(field), "a boolean", value))
        })
    }

    /// A list; its length is the caller's to check before it reads the elements.
    pub(crate) fn list(&self, field: &'static str) -> Result<List<'a>, FieldError> {
        let value = self.required(field)?;
        match value.as_array() {
            Some(values) => Ok(List { values, at: self.path(field) }),
            None => Err(wrong(self.path(field), "a list", value)),
        }
    }
}

/// A list, open for reading.
pub(crate) struct List<'a> {
    pub(crate) values: &'a [Value],
    at: String,
}

impl<'a> List<'a> {
    /// The path of an element.
    pub(crate) fn path(&self, index: usize) -> String {
        format!("{}[{index}]", self.at)
    }

    /// The elements as texts.
    pub(crate) fn texts(&self) -> Result<Vec<&'a str>, FieldError> {
        self.each("a string", Value::as_str)
    }

    /// The elements as unsigned integers.
    pub(crate) fn u64s(&self) -> Result<Vec<u64>, FieldError> {
        self.each("an integer from 0 to 2^64-1", Value::as_u64)
    }

    /// The elements as lists of unsigned integers.
    pub(crate) fn shapes(&self) -> Result<Vec<Vec<u64>>, FieldError> {
        self.each("a list of integers from 0 to 2^64-1", |value| {
            value.as_array()?.iter().map(Value::as_u64).collect()
        })
    }

    fn each<T>(
        &self,
        expected: &'static str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Vec<T>, FieldError> {
        let one = |(i, value)| read(value).ok_or_else(|| wrong(self.path(i), expected, value));
        self.values.iter().enumerate().map(one).collect()
    }
}
