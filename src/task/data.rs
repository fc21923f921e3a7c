use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::fmt;

/// The application's own values, one of each type, that handlers take with
/// [`Context::data`](super::Context::data).
#[derive(Default)]
pub(crate) struct Data {
    values: HashMap<TypeId, Box<dyn Any + Send + Sync>>,
}

impl Data {
    /// Without values.
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Adds a value, and replaces an earlier one of the same type.
    pub(crate) fn insert<T: Send + Sync + 'static>(&mut self, value: T) {
        self.values.insert(TypeId::of::<T>(), Box::new(value));
    }

    /// The value of this type.
    pub(crate) fn get<T: Send + Sync + 'static>(&self) -> Option<&T> {
        self.values.get(&TypeId::of::<T>())?.downcast_ref()
    }
}

impl fmt::Debug for Data {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Data")
            .field("values", &self.values.len())
            .finish()
    }
}
