use std::fmt;
use std::io;

/// What happened, in tierline's words, and the error behind it, if it says more.
///
/// The text never repeats what the source prints: see [`Error`](crate::Error).
#[derive(Debug)]
pub(crate) struct Cause {
    pub(crate) text: Box<str>,
    pub(crate) source: Option<Source>,
}

/// An error of the operating system or of another library.
pub(crate) type Source = Box<dyn std::error::Error + Send + Sync>;

impl Cause {
    /// For an error that a fixed text describes.
    #[cfg(feature = "postgres")]
    pub(crate) fn new(text: &str, source: impl Into<Source>) -> Self {
        Self {
            text: text.into(),
            source: Some(source.into()),
        }
    }
}

impl From<&str> for Cause {
    fn from(text: &str) -> Self {
        Self {
            text: text.into(),
            source: None,
        }
    }
}

impl From<String> for Cause {
    fn from(text: String) -> Self {
        Self {
            text: text.into(),
            source: None,
        }
    }
}

/// The kind of an error of the operating system describes it, and the error itself is the source. Any other error
/// of this type has a text that somebody wrote: that is the description, and nothing is behind it.
impl From<&io::Error> for Cause {
    fn from(error: &io::Error) -> Self {
        match error.raw_os_error() {
            Some(code) if is_described(error.kind()) => Self {
                text: error.kind().to_string().into(),
                source: Some(io::Error::from_raw_os_error(code).into()),
            },
            _ => error.to_string().into(),
        }
    }
}

impl From<&lapin::Error> for Cause {
    fn from(error: &lapin::Error) -> Self {
        match error.kind() {
            lapin::ErrorKind::IOError(error) => Self::from(&**error),
            _ => error.to_string().into(),
        }
    }
}

/// Whether the name of this kind says what happened.
fn is_described(kind: io::ErrorKind) -> bool {
    // `Uncategorized` cannot be named on a stable compiler.
    kind != io::ErrorKind::Other && kind.to_string() != "uncategorized error"
}

impl fmt::Display for Cause {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.text)
    }
}
