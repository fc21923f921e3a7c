use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::fmt;

/// The application's own values, one of each type, that handlers take with
/// [`Context::data`](super::Context::data).
///
/// ```
/// use tierline::task::Data;
///
/// struct Sms {
///     sender: &'static str,
/// }
///
/// let mut data = Data::new();
/// data.insert(Sms { sender: "Hotel" });
/// assert_eq!(data.get::<Sms>().map(|sms| sms.sender), Some("Hotel"));
/// ```
#[derive(Default)]
pub struct Data {
    values: HashMap<TypeId, Box<dyn Any + Send + Sync>>,
}

impl Data {
    /// Without values.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a value, and replaces an earlier one of the same type.
    pub fn insert<T: Send + Sync + 'static>(&mut self, value: T) {
        self.values.insert(TypeId::of::<T>(), Box::new(value));
    }

    /// The value of this type.
    pub fn get<T: Send + Sync + 'static>(&self) -> Option<&T> {
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
