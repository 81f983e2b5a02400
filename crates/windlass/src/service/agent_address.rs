//! Where the agent of a region listens: the file `agent.json` in the region's directory.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use windlass_data::private::{self, PrivateError};

use crate::error::Error;

/// The contents of [`FILE`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentAddress {
    pub endpoint: String,
    /// Where data connections go.
    pub data_port: u16,
    /// The file with the token, if there is one.
    pub token_file: Option<PathBuf>,
    pub pid: u32,
}

/// The name of the file.
pub const FILE: &str = "agent.json";

impl AgentAddress {
    /// Reads the address of the agent of a region on this host.
    pub fn read(region: &Path) -> Result<AgentAddress, Error> {
        let path = region.join(FILE);
        // The owner of the directory decides where the token goes.
        private::open(region).map_err(|e| match e {
            PrivateError::Io { source, .. } => Error::io("read", &path)(source),
            refused => refused.into(),
        })?;
        let text = std::fs::read(&path).map_err(Error::io("read", &path))?;
        serde_json::from_slice(&text).map_err(|e| Error::Usage(format!("{}: {e}", path.display())))
    }
}
